"""What makes speculation lossless: processors per position, position-keyed noise, acceptance."""
