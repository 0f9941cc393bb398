-- Everything that a relay relies on, as found in the database, one row each: kind, name, detail.
-- $1 schema   $2 table
WITH o AS (
    SELECT c.oid, c.relkind::text AS relkind
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relname = $2
)
SELECT 'table' AS kind, '' AS name, o.relkind AS detail FROM o
UNION ALL
SELECT 'column', a.attname::text, pg_catalog.format_type(a.atttypid, NULL)
FROM o JOIN pg_catalog.pg_attribute a ON a.attrelid = o.oid
WHERE a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT 'index', c.relname::text, CASE WHEN i.indisvalid AND i.indisready THEN 'valid' ELSE 'invalid' END
FROM o JOIN pg_catalog.pg_index i ON i.indrelid = o.oid
JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
UNION ALL
SELECT 'trigger', t.tgname::text, CASE t.tgenabled WHEN 'D' THEN 'disabled' ELSE 'enabled' END
FROM o JOIN pg_catalog.pg_trigger t ON t.tgrelid = o.oid
WHERE NOT t.tgisinternal
UNION ALL
SELECT 'side', c.relname::text, c.relkind::text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname IN ($2 || '_alert', $2 || '_awake_until', $2 || '_bucket', $2 || '_replica', $2 || '_relay_state',
                                       $2 || '_token', $2 || '_migrations', $2 || '_webhook_events',
                                       $2 || '_dead_letter', $2 || '_intake_audit')
