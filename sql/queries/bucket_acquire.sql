-- Take free buckets, at random so that starting replicas do not all reach for the same ones.
-- The foreign key fails this if our replica row was taken over meanwhile.
-- $1 token   $2 how many at most
UPDATE {{outbox_bucket}} SET token = $1
WHERE bucket = ANY (ARRAY(
          SELECT b.bucket FROM {{outbox_bucket}} b WHERE b.token IS NULL
          ORDER BY random() LIMIT $2::int FOR UPDATE SKIP LOCKED))
  AND EXISTS (SELECT FROM {{outbox_replica}} r WHERE r.token = $1 AND r.lease_until > clock_timestamp())
RETURNING bucket
