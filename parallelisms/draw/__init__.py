"""Pictures of pipeline schedules, token shards and expert dispatch."""
