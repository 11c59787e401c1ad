#!/bin/sh
# Postgres's image runs this once, in an empty volume.
psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -d postgres \
  -v store_password="$STORE_PASSWORD" -v dump_password="$DUMP_PASSWORD" -f /etc/rolltap/roles.sql
