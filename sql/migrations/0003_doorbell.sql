-- The doorbell: whoever writes events rings only while every relay sleeps. NOTIFY takes a lock of the whole
-- cluster for the time of a commit, which a busy application should not pay for a relay that looks anyway.
-- The protocol is written in src/relay/mod.rs.

-- Until when the relays look by themselves, in milliseconds since 1970 by the database's clock; 0: they sleep.
-- A sequence, because its value is read and set outside of transactions: also writers under REPEATABLE READ
-- see the present one.
CREATE SEQUENCE IF NOT EXISTS {{outbox_awake_until}} AS BIGINT MINVALUE 0 START 0;

-- Keeps the doorbell silent for so many milliseconds from now. Rings for the other relays if it was not
-- silent up to now: they have to look by themselves, too. The time is taken after the value was set, so
-- that whoever found it over before finds the new one or hears the ring.
CREATE OR REPLACE FUNCTION {{outbox_stay_awake}}(ms INT) RETURNS VOID
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
    DECLARE
        before BIGINT;
    BEGIN
        SELECT s.last_value INTO before FROM {{outbox_awake_until}} s;
        PERFORM setval('{{outbox_awake_until}}', (extract(epoch FROM clock_timestamp()) * 1000)::bigint + ms);
        IF (extract(epoch FROM clock_timestamp()) * 1000)::bigint >= before THEN
            PERFORM pg_notify({{channel}}, 'awake');
        END IF;
    END
    $$;

CREATE OR REPLACE FUNCTION {{outbox_ring}}() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
    BEGIN
        -- NOTIFY makes PREPARE TRANSACTION fail: writers under two-phase commit set this to off.
        IF current_setting('bellwire.ring', true) IS NOT DISTINCT FROM 'off' THEN
            RETURN NULL;
        END IF;
        -- An operator's UPDATE of a dead event is rare, and no relay looks for it by itself.
        IF TG_OP <> 'INSERT'
           OR (extract(epoch FROM clock_timestamp()) * 1000)::bigint > (SELECT s.last_value FROM {{outbox_awake_until}} s)
        THEN
            PERFORM pg_notify({{channel}}, '');
        END IF;
        RETURN NULL;
    END
    $$;
