"""For all tests: Ctrl-C has its usual meaning, also where they were started in the background of a shell."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # An ignored signal stays ignored in every process that is started from here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
