"""Drawings of schedules, token shards and dispatch."""
