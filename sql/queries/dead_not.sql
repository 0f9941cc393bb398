-- Events that were named and are not dead, with their status; none for one that does not exist.
-- $1 ids   $2 rows at most
SELECT n.id, n.status
FROM (SELECT named.id, (SELECT o.status FROM {{outbox}} o WHERE o.id = named.id) AS status
      FROM (SELECT DISTINCT unnest($1::bigint[]) AS id) named) n
WHERE n.status IS DISTINCT FROM 'dead'
ORDER BY n.id
LIMIT $2::int
