"""Is speculation lossless? Audits an engine with speculation on and off, and writes down what it would have seen."""
