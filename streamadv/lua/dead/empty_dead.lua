-- Delete or keep the payloads of dead groups; with 'purge' delete their letters too. The ledger goes on counting them as dead. One call
-- stops after the group with which it has reached EMPTY_PAYLOADS payloads.
-- KEYS  void, ledger, dead, garbage, trainer, kept, letters: dead_group ...
-- ARGV  'purge' or 'keep', bytes of dead groups above which to go on, id of each group ...
-- Returns  number of groups emptied, from the first on
-- include dead_letter
-- include keep
local EMPTY_PAYLOADS = 1024
local emptied, payloads = 0, 0

-- Keep the group of a letter. Returns what `keep` does.
local function keep_dead(id)
  if ARGV[1] == 'purge' or not is_chosen('dead', id) then return nil end
  local flat, fields, more, reason = redis.call('HGETALL', keys.dead_group), {}, {}, ''
  for i = 1, #flat, 2 do
    local name = string.match(flat[i], '^log:(.*)$')
    if name then fields[#fields + 1], fields[#fields + 2] = name, flat[i + 1] end
    if flat[i] == 'detail' then more = {'detail', flat[i + 1]} end
    if flat[i] == 'reason' then reason = flat[i + 1] end
  end
  return #fields <= 100 and keep('dead', 'dead:' .. reason, fields, more) or nil
end

for i, dead_group in ipairs(keys.letters) do
  if payloads >= EMPTY_PAYLOADS then break end
  if (tonumber(redis.call('HGET', keys.ledger, 'dead_bytes') or '') or 0) <= tonumber(ARGV[2]) then break end
  emptied, keys.dead_group = i, dead_group
  local id = ARGV[i + 2]
  payloads = payloads + release_payloads(keep_dead, id)
  if ARGV[1] == 'purge' then
    redis.call('DEL', keys.dead_group)
    redis.call('ZREM', keys.dead, id)
  else
    empty_letter(id)
  end
end
return emptied
