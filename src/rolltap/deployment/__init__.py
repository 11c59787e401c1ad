"""A small team's deployment: two proxies on Postgres and Redis, behind nginx, with an engine and Prometheus.

`description` says what each service is started with. `deploy/compose` holds the same for containers (written by
`scripts/deploy_files.py`, compared by a test), and `local` starts the services as processes of this machine: `rolltap
up --local`.
"""
