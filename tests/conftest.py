"""Settings of all tests."""

from hypothesis import settings

# A shared machine makes single examples slow; pytest-timeout bounds the test as a whole.
settings.register_profile("agentrl", deadline=None)
settings.load_profile("agentrl")
