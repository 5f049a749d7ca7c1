"""Oobleck (SOSP 2023): pipelines from templates that go on training when nodes are lost."""
