"""How large policies are: shapes read from a model configuration, and those of models known by name."""
