"""Reuse for whole prompts that resemble an earlier one."""
