-- What an alert says of a dead event. Its payload stays where it is.
-- $1 id   $2 where to stop counting what it holds back
SELECT o.aggregate_type, o.aggregate_id, o.event_type, o.attempts, o.last_error, o.holds IS NOT FALSE AS holds,
       octet_length(o.payload::text)::bigint AS payload_bytes,
       (SELECT least(count(*), $2::int)::bigint FROM (
            (SELECT FROM {{outbox}} w
             WHERE {{outbox_bucket_of}}(w.aggregate_type, w.aggregate_id) = {{outbox_bucket_of}}(o.aggregate_type, o.aggregate_id)
               AND {{outbox_hash_of}}(w.aggregate_type, w.aggregate_id) = {{outbox_hash_of}}(o.aggregate_type, o.aggregate_id)
               AND w.status = 'pending' AND w.claimed_by IS NULL AND {{outbox_walked}}(w.parked, w.next_attempt_at, w.created_at)
               AND w.id > o.id
             LIMIT $2::int)
            UNION ALL
            (SELECT FROM {{outbox}} w
             WHERE {{outbox_bucket_of}}(w.aggregate_type, w.aggregate_id) = {{outbox_bucket_of}}(o.aggregate_type, o.aggregate_id)
               AND {{outbox_hash_of}}(w.aggregate_type, w.aggregate_id) = {{outbox_hash_of}}(o.aggregate_type, o.aggregate_id)
               AND w.status = 'pending' AND w.claimed_by IS NULL AND NOT {{outbox_walked}}(w.parked, w.next_attempt_at, w.created_at)
               AND w.id > o.id
             LIMIT $2::int)) later) AS held_back
FROM {{outbox}} o
WHERE o.id = $1 AND coalesce(o.status = 'dead', false)
