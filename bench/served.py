"""What the client scripts of `pathways bench` share: a process that stays, and does what it is told.

One JSON object per line on standard input, `{"do": NAME, ...arguments}`, one per line back on standard output. So no start-up is
ever inside a window that is measured. The end of standard input ends the process.
"""

import json
import os
import sys
import time
import traceback


def serve(commands):
    """`commands`: functions by name; each takes the arguments of its request and returns a dict."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = commands[request.pop("do")](**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def median(samples):
    samples = sorted(samples)
    return samples[len(samples) // 2]


def timed(call, arguments):
    """Seconds of `call` for each of the arguments."""
    samples = []
    for argument in arguments:
        began = time.perf_counter()
        call(argument)
        samples.append(time.perf_counter() - began)
    return samples
