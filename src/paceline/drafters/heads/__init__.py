"""Heads: small models that draft from the policy's hidden states."""
