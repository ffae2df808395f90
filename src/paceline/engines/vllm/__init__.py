"""The production engine: vLLM behind the engine's seam."""
