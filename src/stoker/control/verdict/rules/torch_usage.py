"""Causes torch.*: a script misuses tensors, modules or autograd. Another attempt would fail in the same way."""

from __future__ import annotations

from stoker.control.verdict.catalogue import Family
from stoker.control.verdict.exit_text import line_evidence

ORDER = 65

family = Family(__name__, line_evidence)
family.entries(r"""
torch.device-mismatch: An operation was given tensors that are on different devices.
  said: [Ee]xpected all tensors to be on the same device|found at least two devices|
      Expected a '?\w+'? device type for generator but found|
      Input type \(torch\.(?:cuda\.)?\w+\) and (?:weight|bias) type \(torch\.(?:cuda\.)?\w+\) should be the same|
      is on (?:CPU|GPU), but expected (?:it|them) to be on (?:CPU|GPU)|
      Expected object of (?:device|backend) type \w+ but got|Tensor on device \S+ is not on the expected device
  summary: {who}: tensors are on different devices{at}: {raised}
  seen: torch's "Expected all tensors to be on the same device", "found at least two devices", or another message
      that names two devices
  unless: the GPU number does not exist: gpu.ordinal
  fix: print the .device of every tensor in {place}; move the model with .to(device) before creating the optimizer, and
      each batch in the loop
  fix: a tensor that a module creates must be a parameter or a buffer (register_buffer), or be created with
      device=x.device; .to(device) does not move plain attributes
  fix: in one of Stoker's own recipes this is a bug in Stoker: report it with the lines above
torch.dtype-mismatch: An operation was given tensors of different or unsupported dtypes.
  said: expected scalar type \w+ but found \w+|have the same dtype, but got|
      Input type \([\w:]+\) and (?:weight|bias) type \([\w:]+\) should be the same|
      result type \w+ can't be cast to the desired output type|to have one of the following scalar types|
      tensors used as indices must be|Expected dtype int\S+ for index|[Ee]xpected dtype \w+ for `|
      expected target dtype to be|Expected self\.dtype to be equal to src\.dtype|"\w+" not implemented for '\w+'
  summary: {who}: tensors have incompatible dtypes{at}: {raised}
  seen: torch's "expected scalar type … but found …", "must have the same dtype", "not implemented for 'Half'" and
      similar messages
  fix: print the .dtype of every tensor in {place}; use torch.autocast, or cast in one place
  fix: labels and indices must be int64 (.long())
  fix: "not implemented for 'Half'" on a CPU: use float32 or bfloat16 there
torch.shape-mismatch: An operation was given tensors of incompatible shapes.
  said: shapes cannot be multiplied|The size of tensor a \(\d+\) must match the size of tensor b|
      Sizes of tensors must match except in dimension|shape '\[[^\]\n]*\]' is invalid for input of size|
      stack expects each tensor to be equal size|The expanded size of the tensor \(\d+\) must match|
      Expected input batch_size \(\d+\) to match target batch_size|Expected size for first two dimensions of batch2|
      Target size \(torch\.Size\([^)\n]*\)\) must be the same as input size|size mismatch, got input|
      Given (?:normalized_shape=|groups=\d+, weight of size)[^\n]{0,80}expected input
  summary: {who}: tensors have incompatible shapes{at}: {raised}
  seen: torch's "shapes cannot be multiplied", "must match the size of tensor b", "is invalid for input of size" and
      similar messages
  unless: ranks that give a collective different shapes: hang.shape-mismatch, gloo.shape
  fix: print the .shape of every tensor in {place}
  fix: if it happens with one batch only: a sample of another length (pad it in the collate function), or a smaller last batch
      (drop_last=True)
torch.state-dict: A checkpoint does not fit the model or the optimizer that it is loaded into.
  said: Error\(s\) in loading state_dict for|(?:Missing|Unexpected) key\(s\) in state_dict|
      loaded state dict (?:contains a parameter group|has a different number of parameter groups)
  summary: {who}: the checkpoint does not fit{at}: {raised}
  seen: torch's "Error(s) in loading state_dict", missing or unexpected keys, or an optimizer state with other parameter
      groups
  unless: the file itself is damaged: data.corrupt
  fix: is it a checkpoint of this model, with the same number of layers, width and vocabulary?
  fix: keys that begin with module. or _orig_mod. were saved from a model wrapped by DDP or torch.compile: save
      model.module.state_dict(), or strip the prefix
  fix: strict=False only if the parameters that it then skips may stay untrained
torch.autograd: The backward pass can't be run as the program requests it.
  said: Trying to backward through the graph a second time|
      needed for gradient computation has been modified by an inplace operation|
      does not require grad and does not have a grad_fn|leaf Variable that requires grad is being used in an in-place|
      grad can be implicitly created only for scalar outputs|
      Expected to have finished reduction in the prior iteration|Expected to mark a variable ready only once
  summary: {who}: the backward pass failed{at}: {raised}
  seen: torch's messages about a graph used twice, a value changed in place, a result without a gradient, or DDP's about
      parameters that were not used
  fix: look at {place}, and at how the loss was computed
  fix: "Expected to have finished reduction": parameters got no gradient in some step; DDP(...,
      find_unused_parameters=True), or remove them from the model
  fix: "modified by an inplace operation": torch.autograd.set_detect_anomaly(True) names the operation
  fix: "a second time": a loss or hidden state of the step before is still in use; .detach() it
  fix: "does not have a grad_fn": the loss was computed under torch.no_grad() or from frozen parameters only
""")
