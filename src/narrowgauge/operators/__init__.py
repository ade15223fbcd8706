"""A precision plan per operator, found inside the running training."""
