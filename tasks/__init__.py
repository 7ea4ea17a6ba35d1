"""The stages of a step, each a thin Prefect task over `moonshift.infra`."""
