"""Settings of all tests."""

import signal

from hypothesis import settings

# A shared machine makes single examples slow; pytest-timeout bounds the test as a whole.
settings.register_profile("agentrl", deadline=None)
settings.load_profile("agentrl")

# A shell's background job ignores Ctrl-C, and so would every command that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
