-- The most bytes of a payload that the table takes; no row: any.
-- $1 name of the trigger
SELECT substring(pg_catalog.pg_get_triggerdef(t.oid) FROM '\(''(\d+)''\)$')::bigint AS most
FROM pg_catalog.pg_trigger t
WHERE t.tgrelid = '{{outbox}}'::regclass AND t.tgname = $1
