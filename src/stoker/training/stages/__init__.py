"""The stages of training: one object each. No torch. docs/stages.md says how to add one."""
