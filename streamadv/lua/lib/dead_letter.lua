-- Dead letters in the sorted set `dead`. The score is the time of death (ms), negative once a letter is emptied: so the
-- letters with payloads follow the emptied ones, the oldest first.
-- KEYS  dead, dead_group, ledger, garbage
-- include clock
local DEAD_DETAIL = 2000  -- characters
local DEAD_BULK = {'log:payloads', 'log:tables', 'log:scores'}  -- only a group that can be requeued needs this

local function empty_letter(group_id)
  redis.call('HDEL', keys.dead_group, unpack(DEAD_BULK))
  redis.call('HSET', keys.dead_group, 'emptied', 1)
  local when = tonumber(redis.call('ZSCORE', keys.dead, group_id) or '') or 0
  redis.call('ZADD', keys.dead, string.format('%.17g', -math.abs(when)), group_id)
end

-- The payloads of the letter, where it has some, are garbage, unless keep_dead(group_id) has taken them. Returns how many.
local function release_payloads(keep_dead, group_id)
  local emptied, bytes, items = unpack(redis.call('HMGET', keys.dead_group, 'emptied', 'bytes', 'log:payloads'))
  local released = 0
  if emptied or not string.match(bytes or '', '^%d+$') then return 0 end
  redis.pcall('HINCRBY', keys.ledger, 'dead_bytes', string.format('%d', -tonumber(bytes)))
  if keep_dead and keep_dead(group_id) then return 0 end
  for item in string.gmatch(items or '', '(%S+ %d+) %d+ %S+') do
    redis.call('RPUSH', keys.garbage, item)
    released = released + 1
  end
  redis.pcall('HINCRBY', keys.ledger, 'live_bytes', bytes)
  return released
end

-- Keep the group's log entry, with the reason. An id that is used again has one letter, the last.
local function write_dead_letter(group_id, fields, reason, detail, count, bytes)
  release_payloads()
  redis.call('DEL', keys.dead_group)
  redis.call('HSET', keys.dead_group, 'reason', reason, 'detail', string.sub(detail, 1, DEAD_DETAIL), 'count', count,
    'bytes', bytes)
  for i = 1, #fields, 2 do redis.call('HSET', keys.dead_group, 'log:' .. fields[i], fields[i + 1]) end
  redis.call('ZADD', keys.dead, string.format('%.17g', now_ms()), group_id)
end
