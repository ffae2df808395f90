"""What people look at: metrics and their one definition, plots, the HTML report."""
