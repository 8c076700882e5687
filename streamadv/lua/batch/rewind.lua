-- Naming looks at the groups logs again from these entries on.
-- KEYS  void, lineage
-- ARGV  epoch, running moments JSON without what is named again ('' = none, 'as it is'), then shard, id of the last groups
--       entry not to be looked at, ...
-- Returns  1, or -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[2], 'running')
elseif ARGV[2] ~= 'as it is' then
  redis.call('HSET', KEYS[2], 'running', ARGV[2])
end
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[2], 'cursor:' .. ARGV[i], ARGV[i + 1]) end
return 1
