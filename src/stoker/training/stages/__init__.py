"""The stages of training: one object per stage, one file per object. No torch. docs/stages.md says how to add one."""
