"""Settings: fields of flags, variables and files, and what they make of the model folder."""
