"""NF4 against bitsandbytes: the same codes, the same numbers, each reads what the other stores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from devices import needs_gpu
from stoker.contract.errors import Refusal
from stoker.training.model import hf_config, hf_files, nf4, nf4_size
from stoker.training.model.nf4_size import NF4_PARTS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of very different size, one of them zero; its blocks' count is no multiple of 256."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(192, 1, generator=generator)
    rows[5] = 0
    return (torch.randn(192, 1088, generator=generator) * 0.02 * rows).to(dtype)


def theirs() -> Any:
    return pytest.importorskip("bitsandbytes.functional", reason="no bitsandbytes here to compare with")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_codes_and_numbers_are_those_of_bitsandbytes(dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    functional = theirs()
    for seed in range(4):
        w = weight(seed, dtype).to(device)
        ours = nf4.quantize(w)
        codes, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
        assert torch.equal(ours.second, state.state2.absmax) and torch.equal(ours.offset, state.offset)
        empty = (w.reshape(-1, nf4.BLOCK) == 0).all(1)
        assert empty.any() and not nf4.dequantize(ours).reshape(-1, nf4.BLOCK)[empty].any(), "theirs has noise there"
        same = (ours.codes == codes.flatten()).view(-1, nf4.BLOCK // 2)[~empty]
        if device == "cuda":
            assert same.all() and torch.equal(ours.scales, state.absmax)
        else:  # its CPU code takes the level beside the nearest where a number is almost in the middle of two
            assert float(same.float().mean()) > 0.999
            apart = (ours.scales.int() - state.absmax.int()).abs()
            assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 0.005
        stored = nf4.from_tensors(tensors_of(codes, state), "w", "a folder")
        numbers = functional.dequantize_4bit(codes, state)
        if device == "cuda":
            assert torch.equal(nf4.dequantize(stored), numbers)
        else:  # with AVX-512 its CPU code rounds otherwise
            torch.testing.assert_close(nf4.dequantize(stored), numbers, rtol=2e-3, atol=1e-7)


@needs_gpu
def test_a_scale_in_the_middle_of_two_gets_the_code_that_bitsandbytes_gives_it() -> None:
    levels = torch.tensor(nf4.second_levels())
    values = torch.cat([(levels[:-1] + levels[1:]) * 0.5, levels[-1:]]).cuda()  # the last: so they are scaled by 1
    codes, _ = theirs().quantize_blockwise(values, blocksize=256)
    assert torch.equal(nf4.scaled(values)[0], codes)


def tensors_of(codes: Tensor, state: Any) -> dict[str, Tensor]:
    return {"w": codes, **{f"w.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}}


def test_bitsandbytes_reads_what_is_written() -> None:
    functional = theirs()
    ours = nf4.quantize(weight(1))
    tensors = nf4.to_tensors(ours, "w")
    parts = {name: tensor for name, tensor in tensors.items() if name != "w"}
    state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
    assert torch.equal(functional.dequantize_4bit(tensors["w"], state), nf4.dequantize(ours))


@pytest.mark.parametrize("dtype", DTYPES)
def test_levels_are_kept_and_others_go_to_the_nearest(dtype: torch.dtype) -> None:
    """Of a block with the scale 1: nothing is lost but the offset's rounding."""
    levels = torch.tensor(nf4.LEVELS)
    block = levels.repeat(4)
    q = nf4.quantize(block.repeat(1, 512).to(dtype))
    torch.testing.assert_close(nf4.dequantize(q).float()[0, :16], levels, rtol=1e-2, atol=1e-3)
    w = weight(2, torch.float32)
    scales = w.reshape(-1, nf4.BLOCK).abs().amax(1)
    error = (nf4.dequantize(nf4.quantize(w)) - w).view(-1, nf4.BLOCK).abs().amax(1)
    # half of the widest gap between levels, and what the scale itself lost
    assert bool((error <= scales * (0.5 * 0.3039) + 0.02 * scales.max()).all())


def test_it_takes_the_bytes_that_are_said_and_fills_a_buffer() -> None:
    w = weight(0)
    q = nf4.quantize(w)
    held = sum(tensor.numel() * tensor.element_size() for tensor in (q.codes, q.scales, q.second, q.offset))
    assert held == nf4_size.stored_bytes(w.numel())
    assert abs(held * 8 / w.numel() - nf4.BITS) < 0.01
    joined, parts = nf4.join([q, q])
    assert [group.size for group in joined] == [(192, 1088)] * 2, "its scales don't fill blocks of 256"
    buffer = torch.empty_like(w)
    assert nf4.expand(joined[0], buffer) is buffer and torch.equal(buffer, nf4.dequantize(parts[1]))


def test_parts_whose_blocks_are_full_are_read_as_one() -> None:
    weights = [torch.randn(rows, 256) * 0.02 for rows in (128, 64)]
    (whole,), parts = nf4.join([nf4.quantize(w) for w in weights])
    assert whole.size == (192, 256) and parts[1].codes.data_ptr() > whole.codes.data_ptr()
    found = nf4.expand(whole, torch.empty(whole.size))
    assert torch.equal(found, torch.cat([nf4.dequantize(nf4.quantize(w)) for w in weights]))


def test_a_weight_that_blocks_do_not_fill_is_told_from_one_that_they_do() -> None:
    assert nf4_size.storable((4, 32)) and not nf4_size.storable((3, 7)) and not nf4_size.storable((64,))
    with pytest.raises(ValueError, match="21 elements"):
        nf4.quantize(torch.zeros(3, 7))


def changed(**keys: Any) -> dict[str, Tensor]:
    tensors = nf4.to_tensors(nf4.quantize(weight(3)), "w")
    about = json.loads(bytes(tensors[f"w.{nf4.STATE}"].tolist()))
    state = torch.tensor(list(json.dumps({**about, **keys}).encode()), dtype=torch.uint8)
    return {**tensors, f"w.{nf4.STATE}": state}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"w": torch.zeros(4, dtype=torch.uint8)}, "w.absmax is missing"),
        (changed(quant_type="fp4"), "quant_type is 'fp4'"),
        (changed(blocksize=128), "blocksize is '128'"),
        (changed(shape=[192, 64]), "codes has 104448 numbers, and 6144 are needed"),
        (changed(shape=[-64, -64]), "shape is"),
        (changed(shape=[True, 64]), "shape is"),
        (changed(nested_offset="x"), "nested_offset is 'x'"),
        (changed(dtype="object"), "dtype 'object'"),
        ({**changed(), "w.absmax": torch.zeros(7, dtype=torch.uint8)}, "absmax has 7 numbers"),
        ({**changed(), "w.absmax": torch.zeros(3264)}, "absmax is torch.float32"),
        ({**changed(), "w.quant_map": torch.zeros(16)}, "its levels are others"),
        ({**changed(), f"w.{nf4.STATE}": torch.full((9,), 91, dtype=torch.uint8)}, "its description"),
    ],
)  # fmt: skip
def test_what_is_stored_otherwise_is_refused_in_one_line(
    tensors: dict[str, Tensor], words: str, tmp_path: Path
) -> None:
    with pytest.raises(Refusal) as caught:
        nf4.from_tensors(tensors, "w", str(tmp_path))
    assert words in caught.value.line and str(tmp_path) in caught.value.line and "\n" not in caught.value.line


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 320, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}  # fmt: skip


Q = "model.layers.0.self_attn.q_proj.weight"


def _described(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    keys = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(keys))
    return str(folder)


def _model(folder: Path, change: Callable[[dict[str, Any]], None] = lambda tensors: None, **keys: Any) -> str:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from safetensors.torch import save_file

    where = _described(folder, **keys)
    tensors = {
        part.name: torch.full(part.shape, 0.5)
        for place in hf_files.places(hf_config.shape_of(where))
        for part in place.parts
    }
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return where


def _state(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        import torch

        name = f"{Q}.{NF4_PARTS[-1]}"
        about = {**json.loads(bytes(tensors[name].tolist())), **changes}
        tensors[name] = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)

    return change


def _part(place: int, *shape: int, dtype: str = "float32") -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        import torch

        tensors[f"{Q}.{NF4_PARTS[place]}"] = torch.zeros(shape, dtype=getattr(torch, dtype))

    return change


HOSTILE_NF4: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "three levels": (_part(1, 3), "quant_map has 3 numbers"),
    "no levels": (_part(1, 0), "quant_map has 0 numbers"),
    "levels of integers": (_part(1, 16, dtype="int64"), "quant_map has 16 numbers of I64"),
    "a table of levels": (_part(3, 2, 3), "nested_quant_map has 6 numbers"),
    "no scales": (_part(0, 0, dtype="uint8"), "absmax has 0 numbers"),
    "no description": (_part(4, 0, dtype="uint8"), "its description can't be read"),
    "a description of floats": (_part(4, 2), "its description has 8 bytes of F32"),
    "a list of dtypes": (_state(dtype=["x"]), "dtype"),
    "a huge offset": (_state(nested_offset=10**39), "nested_offset"),
    "no number for an offset": (_state(nested_offset=math.nan), "nested_offset"),
    "another shape": (_state(shape=[32, 128]), r"says it is \[32, 128\]"),
}


@pytest.mark.parametrize("kind", HOSTILE_NF4)
def test_hostile_parts_of_4_bits_are_refused_by_their_headers(tmp_path: Path, kind: str) -> None:
    change, says = HOSTILE_NF4[kind]

    def quantized(tensors: dict[str, Any]) -> None:
        from stoker.training.model import nf4

        tensors.update(nf4.to_tensors(nf4.quantize(tensors.pop(Q)), Q))
        change(tensors)

    folder = _model(tmp_path / "m", quantized, quantization_config=NF4)
    with pytest.raises(Refusal, match=says) as caught:
        hf_files.check(folder, hf_config.shape_of(folder))
    assert "can't be read: TypeError" not in caught.value.line
