      coalesce(o.status = 'dead', false)
      AND ($1::bigint[] IS NULL OR o.id = ANY ($1))
      AND ($2::text IS NULL OR o.aggregate_type = $2)
      AND ($3::text IS NULL OR o.aggregate_id = $3)
      AND ($4::text IS NULL OR o.event_type = $4)
      AND ($5::text IS NULL OR split_part(o.last_error, ':', 1) = $5)
      AND ($6::float8 IS NULL OR o.created_at <= now() - make_interval(secs => $6))
      AND ($7::float8 IS NULL OR o.created_at >= now() - make_interval(secs => $7))
      AND o.id > $8
