-- Wake every relay. $1 says why: 'peer' when shares may have changed, empty when rows were freed.
SELECT pg_notify({{channel}}, $1)
