-- First statement of the claim's transaction: which buckets are ours, and let nobody take them
-- before we commit. A statement of its own, because the claim must take its snapshot after the
-- lock is had: READ COMMITTED takes it before waiting.
-- $1 token
SELECT bucket FROM {{outbox_bucket}} WHERE token = $1 FOR SHARE
