-- Delete the payloads of dead groups; with 'purge' also what is known of them. They stay counted as dead. One call goes
-- through groups of EMPTY_PAYLOADS payloads, and the one that goes beyond.
-- KEYS  void, ledger, dead, garbage, hash of each dead group ...
-- ARGV  'purge' or 'keep', bytes of dead groups above which to go on, id of each group ...
-- Returns  groups dealt with, from the first on
-- include dead_letter
redis.call('DEL', KEYS[1])
local EMPTY_PAYLOADS = 1024
local first_group, first_id = 5, 3
local keys = {dead = KEYS[3]}
local dealt, payloads = 0, 0
for i = 0, #KEYS - first_group do
  if payloads >= EMPTY_PAYLOADS then break end
  if (tonumber(redis.call('HGET', KEYS[2], 'dead_bytes') or '') or 0) <= tonumber(ARGV[2]) then break end
  dealt, keys.dead_group = i + 1, KEYS[first_group + i]
  local id = ARGV[first_id + i]
  local group = redis.call('HMGET', keys.dead_group, 'emptied', 'bytes', 'log:payloads')
  if not group[1] and string.match(group[2] or '', '^%d+$') then
    for item in string.gmatch(group[3] or '', '[^\n]+') do
      redis.call('RPUSH', KEYS[4], item)
      payloads = payloads + 1
    end
    redis.pcall('HINCRBY', KEYS[2], 'dead_bytes', string.format('%d', -tonumber(group[2])))
    redis.pcall('HINCRBY', KEYS[2], 'live_bytes', group[2])
  end
  if ARGV[1] == 'purge' then
    redis.call('DEL', keys.dead_group)
    redis.call('ZREM', keys.dead, id)
  else
    empty_letter(keys, id)
  end
end
return dealt
