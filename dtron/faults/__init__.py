"""Detection and handling of faults.

signals          SIGTERM, SIGINT, SIGUSR1: all ranks stop at the same step and save, by a deadline
watchdog         hangs: report which ranks wait in which collective, then exit
spikes           loss spikes: warn, skip the step, or roll back
stragglers       which rank is slow, and in which part of the step
corruption       replicas of parameters that differ; a step that is not reproducible
memory           errors for failed allocations
failure          which rank failed first
flight_recorder  reader of torch's record of collectives
guards           the checks that the section [faults] of the config turns on
"""
