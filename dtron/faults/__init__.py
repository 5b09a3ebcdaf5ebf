"""Faults that training survives, or reports before it ends: one per file.

signals     SIGTERM, SIGINT, SIGUSR1: all ranks stop at one step and save, within a deadline
watchdog    a step that does not end: who waits in which collective and who does not; the end
spikes      losses far above those before: a warning, a skipped step, or a way back
stragglers  which rank is slow, and in which part of the step
replicas    copies of parameters that differ; a step computed twice
guards      the ones that a run's config turns on
"""
