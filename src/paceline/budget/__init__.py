"""What drafting costs and pays."""
