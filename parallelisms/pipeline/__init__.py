"""Pipeline parallelism: schedules, stages, and their execution."""
