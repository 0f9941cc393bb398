-- Publishing from any language: a function that writes an event as the library does, and says at once which
-- argument is wrong, rather than letting the relay find out.

-- The id that this session drew last for the outbox. SECURITY DEFINER with a fixed search_path, so that who may only
-- INSERT learns the id of the event just written; it tells a session nothing but what the session did itself.
CREATE OR REPLACE FUNCTION {{outbox_drawn_id}}() RETURNS BIGINT
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
    BEGIN
        RETURN currval(pg_get_serial_sequence('{{outbox}}', 'id'));
    END
    $$;

-- Writes an event within the caller's transaction; answers its outbox id. With the caller's rights: INSERT is
-- enough. No search_path of its own, since triggers that the application has on its table may rely on the caller's.
--
-- The payload has the column's type: what is json there stays byte for byte as it was written. All errors about an
-- argument have SQLSTATE 22023 and name it first; a payload over the limit has 54000.
CREATE OR REPLACE FUNCTION {{outbox_publish}}(
    aggregate_type    TEXT,
    aggregate_id      TEXT,
    event_type        TEXT,
    payload           {{outbox}}.payload%TYPE,
    headers           JSONB DEFAULT NULL,
    correlation_id    TEXT DEFAULT NULL,
    event_id          UUID DEFAULT NULL,
    due_at            TIMESTAMPTZ DEFAULT NULL,
    max_payload_bytes INT DEFAULT NULL
) RETURNS BIGINT
    LANGUAGE plpgsql
    AS $$
    DECLARE
        wrong TEXT;
        drawn BIGINT;
    BEGIN
        -- 255 bytes: no broker carries a longer routing key or type. 4096 bytes: longer keys are mistakes, and fit no
        -- header beside others. 65535 bytes: as much as all headers of a JetStream message.
        wrong := CASE
            WHEN coalesce(aggregate_type, '') = '' THEN 'aggregate_type is empty'
            WHEN octet_length(aggregate_type) > 255
                THEN format('aggregate_type has %s bytes, at most 255 are taken', octet_length(aggregate_type))
            WHEN coalesce(aggregate_id, '') = '' THEN 'aggregate_id is empty'
            WHEN octet_length(aggregate_id) > 4096
                THEN format('aggregate_id has %s bytes, at most 4096 are taken', octet_length(aggregate_id))
            WHEN coalesce(event_type, '') = '' THEN 'event_type is empty'
            WHEN octet_length(event_type) > 255
                THEN format('event_type has %s bytes, at most 255 are taken', octet_length(event_type))
            WHEN payload IS NULL THEN 'payload is NULL: for an event without content give JSON null'
            WHEN octet_length(correlation_id) > 4096
                THEN format('correlation_id has %s bytes, at most 4096 are taken', octet_length(correlation_id))
            WHEN jsonb_typeof(headers) <> 'object'
                THEN format('headers is a JSON %s, an object of strings is needed', jsonb_typeof(headers))
            WHEN octet_length(headers::text) > 65535
                THEN format('headers has %s bytes, at most 65535 are taken', octet_length(headers::text))
            WHEN NOT isfinite(due_at) THEN 'due_at is infinite: it would hold back its aggregate for ever'
            WHEN max_payload_bytes < 1 THEN 'max_payload_bytes is less than 1'
        END;
        IF wrong IS NULL AND headers <> '{}' THEN
            SELECT CASE WHEN h.key = '' THEN 'headers has an empty name'
                        WHEN octet_length(h.key) > 255
                            THEN format('headers has a name of %s bytes, at most 255 are taken', octet_length(h.key))
                        ELSE format('headers has a %s under %s, a string is needed', jsonb_typeof(h.value), h.key) END
            INTO wrong
            FROM jsonb_each(headers) h
            WHERE h.key = '' OR octet_length(h.key) > 255 OR jsonb_typeof(h.value) <> 'string'
            LIMIT 1;
        END IF;
        IF wrong IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = wrong;
        END IF;
        IF max_payload_bytes IS NOT NULL AND octet_length(payload::text) > max_payload_bytes THEN
            RAISE EXCEPTION USING ERRCODE = '54000',
                MESSAGE = format('payload has %s bytes, at most %s are taken', octet_length(payload::text), max_payload_bytes),
                DETAIL = 'max_payload_bytes of the call';
        END IF;
        -- RETURNING needs the right to read the id, which a writer need not have.
        IF has_column_privilege('{{outbox}}'::regclass, 'id', 'SELECT') THEN
            INSERT INTO {{outbox}} AS o (aggregate_type, aggregate_id, event_type, payload, headers, correlation_id, event_id,
                                         next_attempt_at)
            VALUES (aggregate_type, aggregate_id, event_type, payload, headers, correlation_id,
                    coalesce(event_id, gen_random_uuid()), coalesce(due_at, now()))
            RETURNING o.id INTO drawn;
        ELSE
            INSERT INTO {{outbox}} (aggregate_type, aggregate_id, event_type, payload, headers, correlation_id, event_id,
                                    next_attempt_at)
            VALUES (aggregate_type, aggregate_id, event_type, payload, headers, correlation_id,
                    coalesce(event_id, gen_random_uuid()), coalesce(due_at, now()));
            drawn := {{outbox_drawn_id}}();
        END IF;
        RETURN drawn;
    END
    $$;

-- What `bellwire migrate --max-payload-bytes` makes a trigger of. Not a CHECK: that would be looked at with every
-- update too, and the relay could not even claim a larger event of before.
CREATE OR REPLACE FUNCTION {{outbox_refuse_large}}() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
    BEGIN
        IF octet_length(NEW.payload::text) > TG_ARGV[0]::bigint THEN
            RAISE EXCEPTION USING ERRCODE = '54000',
                MESSAGE = format('payload has %s bytes, at most %s are taken', octet_length(NEW.payload::text), TG_ARGV[0]),
                DETAIL = format('trigger %s of table %s', TG_NAME, TG_TABLE_NAME),
                HINT = 'The limit is set by bellwire migrate --max-payload-bytes.';
        END IF;
        RETURN NEW;
    END
    $$;
