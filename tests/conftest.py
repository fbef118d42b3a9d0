"""Settings of all tests."""

import os
import signal

from hypothesis import settings

# A shared machine makes single examples slow; pytest-timeout bounds the test as a whole. CI looks at the same examples
# each time: a new one that fails is nothing that the change at hand did.
settings.register_profile("agentrl", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("agentrl")

# A shell's background job ignores Ctrl-C, and so would every command that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
