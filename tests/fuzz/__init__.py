"""Seeded hostile input. `make fuzz CASES=10000 SEED=0` runs it, `python -m tests.fuzz --only 17` repeats one case.

    generators  ->  Case (files, a question, whether it is sound)  ->  oracles  ->  accepted, refused, or a failure

A failure is a traceback, an exit code other than 0, 1 and 2, more than 20 seconds of processor time, 120 seconds by the
clock, more than 1 GB, or a number that differs from what the format's own reader gives.
"""
