-- Settings of every session of ours, whatever role or database defaults say.
--
-- The planner's choices are pinned: each statement has one good plan (index probes), and statistics
-- that are stale after a bulk load must not talk it into scanning the table.
SET default_transaction_isolation = 'read committed';
SET client_min_messages = 'warning';
SET plan_cache_mode = 'force_generic_plan';
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SET jit = off;
SET max_parallel_workers_per_gather = 0;
SET lock_timeout = '1s';
SET statement_timeout = '{{statement_timeout_ms}}ms';
SET idle_in_transaction_session_timeout = '2s';
