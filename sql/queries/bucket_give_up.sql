-- $1 token   $2 buckets of which nothing is in hand
UPDATE {{outbox_bucket}} SET token = NULL WHERE token = $1 AND bucket = ANY ($2::int[]) RETURNING bucket
