"""Settings of all tests."""

from hypothesis import settings

# A time limit per example says more about the machine's load than about the code.
settings.register_profile("narrowgauge", deadline=None)
settings.load_profile("narrowgauge")
