-- A dead letter: listed by its time, with the reason and the group's entry of the log.
--   keys  dead, hash of the dead group
local function write_dead_letter(keys, group_id, fields, reason, detail, count, bytes)
  redis.call('DEL', keys.dead_group)
  redis.call('HSET', keys.dead_group, 'reason', reason, 'detail', detail, 'count', count, 'bytes', bytes)
  for i = 1, #fields, 2 do redis.call('HSET', keys.dead_group, 'log:' .. fields[i], fields[i + 1]) end
  redis.call('ZADD', keys.dead, string.format('%.17g', now_ms()), group_id)
end
