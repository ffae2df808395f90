"""Forward passes of transformers models over packed ragged rows: KV slots, tree masks, logits where they are needed."""
