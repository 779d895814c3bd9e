"""What is done to a model before and while it trains: building, agreeing, casting, recomputing, compiling."""
