-- Remove an item that no process of this run wrote from a stream, hash, sorted set or list, and list it with the reason.
-- KEYS  void, ledger, malformed,
--       place: rollouts | scoring | work | results | groups | batches | producers | open | scored | garbage
-- ARGV  XDEL, HDEL, ZREM or LREM, consumer group ('' = none), item (entry id, field or member), name of the place, reason,
--       its text
-- Returns  1, or 0 when somebody else has removed it
-- include malformed
local key, removal, item = keys.place, ARGV[1], ARGV[3]
if ARGV[2] ~= '' then redis.call('XACK', key, ARGV[2], item) end
local removed
if removal == 'LREM' then removed = redis.call('LREM', key, 1, item) else removed = redis.call(removal, key, item) end
if removed == 0 then return 0 end
note_malformed(ARGV[4], item, ARGV[5], ARGV[6])
return 1
