-- The store's user and database, made once by a superuser:
--   psql -v store_password=... -v dump_password=... -f roles.sql
-- `rolltap` owns the tables and is no superuser, so that tenants are apart. Row-level security hides rows from it where
-- no tenant is set, so `pg_dump` runs as `rolltap_dump`, which reads everything and changes nothing.
CREATE ROLE rolltap LOGIN PASSWORD :'store_password';
CREATE ROLE rolltap_dump LOGIN BYPASSRLS PASSWORD :'dump_password' IN ROLE pg_read_all_data;
CREATE DATABASE rolltap OWNER rolltap;
