"""Environments that come with the project, by the name that `rollout.environment` takes."""
