-- Remove what nobody of this run wrote from a stream or hash. A record on its way to a group counts as a
-- trajectory: pushed, if the push script has not counted it, and dead.
-- KEYS  void, ledger, malformed,
--       place: rollouts | scoring | work | results | groups | producers | open | scored | garbage,
--       streams: rollouts | scoring ...
-- ARGV  XDEL, HDEL, ZREM or LREM, consumer group ('' = none), item (entry id, field, member), counter of the records in those streams
--       ('' = no records, 'pushed' = records that nothing counts), name of the place, reason, its text
-- Returns  1, or 0 when somebody else has removed it
-- include malformed
if ARGV[2] ~= '' and redis.call('XACK', keys.place, ARGV[2], ARGV[3]) == 0 then return 0 end
local removed
if ARGV[1] == 'LREM' then
  removed = redis.call('LREM', keys.place, 1, ARGV[3])
else
  removed = redis.call(ARGV[1], keys.place, ARGV[3])
end
if removed == 0 then return 0 end
if ARGV[4] == 'pushed' then
  redis.pcall('HINCRBY', keys.ledger, 'pushed', 1)
elseif ARGV[4] ~= '' then
  local length = 0
  for _, stream in ipairs(keys.streams) do length = length + redis.call('XLEN', stream) end
  leave(keys, ARGV[4], 1, length)
end
note_malformed(keys, ARGV[5], ARGV[3], ARGV[4] == '' and 0 or 1, ARGV[6], ARGV[7])
return 1
