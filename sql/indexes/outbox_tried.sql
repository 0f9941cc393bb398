-- Of the unclaimed events that were tried before the one that was written first, for lag; those never tried are
-- found by outbox_due. Few, so it costs writers and claims nothing. The predicate is opaque for the reason given there.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_tried}} ON {{outbox}} (created_at)
    WHERE coalesce(status = 'pending' AND claimed_by IS NULL AND (attempts > 0 OR last_error IS NOT NULL), false)
