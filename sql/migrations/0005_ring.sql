-- The doorbell's trigger at half its price, and its value read and set by one relay at a time.

-- As in migration 0003, under a lock: between reading the former value and setting the new one no other relay may set
-- it to 0 and go to sleep, or it would not be rung for and would not look. The lock is held for the time of this
-- statement; its class is "bwrg".
CREATE OR REPLACE FUNCTION {{outbox_stay_awake}}(ms INT) RETURNS VOID
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
    DECLARE
        before BIGINT;
    BEGIN
        PERFORM pg_advisory_xact_lock(1651995239, '{{outbox_awake_until}}'::regclass::oid::int);
        SELECT s.last_value INTO before FROM {{outbox_awake_until}} s;
        PERFORM setval('{{outbox_awake_until}}', (extract(epoch FROM clock_timestamp()) * 1000)::bigint + ms);
        IF (extract(epoch FROM clock_timestamp()) * 1000)::bigint >= before THEN
            PERFORM pg_notify({{channel}}, 'awake');
        END IF;
    END
    $$;

-- From now on writers ring.
CREATE OR REPLACE FUNCTION {{outbox_go_quiet}}() RETURNS VOID
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock(1651995239, '{{outbox_awake_until}}'::regclass::oid::int);
        PERFORM setval('{{outbox_awake_until}}', 0);
    END
    $$;

-- Every writer pays for this one at every statement, so its common path is one expression without a query: the value
-- is read by the function behind pg_sequences.last_value (NULL before the first setval), and the clock as a double.
CREATE OR REPLACE FUNCTION {{outbox_ring}}() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
    BEGIN
        IF date_part('epoch', clock_timestamp()) * 1000 > coalesce(pg_sequence_last_value('{{outbox_awake_until}}'::regclass), 0)
           -- NOTIFY makes PREPARE TRANSACTION fail: writers under two-phase commit set this to off.
           AND current_setting('bellwire.ring', true) IS DISTINCT FROM 'off'
        THEN
            PERFORM pg_notify({{channel}}, '');
        END IF;
        RETURN NULL;
    END
    $$;
