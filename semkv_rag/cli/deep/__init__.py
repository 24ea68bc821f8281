"""`semkv doctor --deep`: the engine checked at length on this machine, one module for each subject."""
