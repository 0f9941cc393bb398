-- Rows in hand, of all replicas: small. Is anything of this aggregate in hand? What did a dead one hold?
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_claimed}} ON {{outbox}} (
    {{outbox_hash_of}}(aggregate_type, aggregate_id), id
) WHERE status = 'pending' AND claimed_by IS NOT NULL
